"""The base of every request's body. Strict: no coercion, unknown fields are errors."""

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def invalid(legal: str) -> PydanticCustomError:
    """The error of a value for which `legal` was expected."""
    return PydanticCustomError("invalid", "{text}", {"text": f"expected {legal}"})
