"""Words in, words out: configurations and command lines, and what each command prints and returns."""

from scripts.behaviour.words.part import compare, record, record_again

__all__ = ["compare", "record", "record_again"]
