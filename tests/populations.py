"""Results of queries whose population is declared in a test."""

from dataclasses import replace


def in_population(results, **attributes):
    """Return labelled or scored results with other attributes of their population."""
    return replace(results, population=replace(results.population, **attributes))
