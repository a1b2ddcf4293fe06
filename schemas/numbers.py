"""Kinds of numbers in messages."""

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]  # what any reader's 64-bit integer holds
WHOLE_MAX = 2**53  # beyond it readers of JSON may round
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
