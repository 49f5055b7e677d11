"""The `specjax` command."""
