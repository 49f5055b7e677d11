"""Runs over files: inference, output directories, and what a run hangs on."""
