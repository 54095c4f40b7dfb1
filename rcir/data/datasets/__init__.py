"""Readers of published data sets, one file each: `read` gives the raw data set as published."""
