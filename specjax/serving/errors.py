"""Refusals in OpenAI's form."""

from typing import Any


class RefusedError(Exception):
    """A request that is not answered, with an HTTP status and the field that is to blame."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"type": kinds.get(self.status, kind), "param": self.param, "code": self.code}
        return {"error": {"message": str(self), **error}}
