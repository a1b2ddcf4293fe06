"""What every table of mesh.toml has in common: no unknown keys, no changes, no infinite numbers."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
