"""The base of every data configuration."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Data:
    """Where examples come from. A configuration file picks one of the subclasses; the command line sets its fields."""
