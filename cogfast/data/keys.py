"""Keys of the data."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cogfast.core.keys import After, Keys, Range, Share


def data_param(name: str) -> str:
    """Return the dotted key of a parameter of the data set."""
    return f"data.params.{name}"


class DataKeys(Keys):
    """Sources of data and the processes that read them."""

    train_data: Annotated[list[str], After("profiling")] = Field(default_factory=list)
    """sources of training data: folders, manifests or shards, as data.target reads them; paths, or addresses
    such as s3://bucket/clips"""
    valid_data: list[str] = Field(default_factory=list)
    """sources of held-out data, like train_data"""
    train_data_weights: list[Annotated[float, Range(0, 10**6)]] | None = None
    """how often an epoch reads each source of train_data"""
    split: str = "1,0,0"
    """shares for training, validation and test if valid_data is empty"""
    num_workers: Annotated[int, Range(0, 256), After("local_cache")] = 1
    """processes per rank that read and decode; 0: the training process reads"""
    prefetch_factor: Annotated[int, Range(1, 1024)] = 4
    """batches that each worker decodes ahead"""
    decode_timeout: Annotated[float, Range(0, 10**6)] = 120.0
    """seconds to read one sample; 0: no limit"""
    max_bad_fraction: Share = 0.05
    """fraction of unreadable samples above which the run stops"""
