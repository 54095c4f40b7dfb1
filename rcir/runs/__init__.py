"""Runs in their folders: what they hold, where they are found, how they compare."""
