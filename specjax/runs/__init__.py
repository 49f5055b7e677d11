"""Runs over files: inference, output directories and records of runs."""
