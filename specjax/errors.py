"""The errors whose messages are for users; all others are faults of specjax."""


class UserError(ValueError):
    """What a user gave cannot be used; the message names it and says what to do."""


class MissingLibraryError(UserError, ImportError):
    """A library that one of specjax's extras installs is absent; the message has the command."""
