"""Readers of data sets by kind: each function gives one set as published, or its splits."""
