"""The `specjax` command."""

# The exit status of an interrupted command.
INTERRUPTED = 130
