"""The client's fields from which the fields of a translated chat come, so that an error names what the client wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastdecode.api.errors import ApiError


class Origins(dict[str, str]):
    """For names of a chat's fields, the names of the client's fields.

    An entry stands for what lies within it, too: with {"messages[1]": "input[0]"}, messages[1].content[2] comes from
    input[0].content[2]. A field without an entry has the same name in both.
    """

    def of(self, param: str) -> str:
        """The name of the client's field from which the chat's field `param` comes."""
        name = param
        while name not in self:
            if (end := max(name.rfind("."), name.rfind("["))) < 0:
                return param
            name = name[:end]
        return self[name] + param[len(name) :]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Give ApiErrors of the chat the names of the client's fields."""
        try:
            yield
        except ApiError as error:
            if error.param is not None:
                named = self.of(error.param)
                if error.message.startswith(f"{error.param}: "):
                    error.message = named + error.message[len(error.param) :]
                error.param = named
            raise
