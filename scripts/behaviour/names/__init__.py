"""Names that users wrote: public names, classes of their own, names of ops and parameters, and the wheel."""

from scripts.behaviour.names.part import compare, record

__all__ = ["compare", "record"]
