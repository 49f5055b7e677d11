"""The errors whose messages are for users; all others are faults of specjax."""


class UserError(ValueError):
    """What a user gave cannot be used; the message names it and says what to do."""


class MissingLibraryError(UserError, ImportError):
    """A library that one of specjax's extras installs is absent; the message has the command."""


# The errors whose message is for users: their value, or the system's word on a file.
REFUSALS = (UserError, OSError)
