"""The one list of extensions. The core imports this file, and no other of this folder."""

from __future__ import annotations

from cogfast.extensions.cache.keys import CacheKeys
from cogfast.extensions.elastic.keys import ElasticKeys
from cogfast.extensions.exports.keys import ExportKeys
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.extensions.plan.keys import FitKeys
from cogfast.extensions.publish.keys import PublishKeys
from cogfast.extensions.sample.keys import EvaluationKeys, SamplingKeys
from cogfast.extensions.scores.keys import ScoreKeys
from cogfast.extensions.sparse.keys import SparseKeys
from cogfast.extensions.stores.keys import StoreKeys


class ExtensionKeys(
    ExportKeys,
    PublishKeys,
    CacheKeys,
    StoreKeys,
    ElasticKeys,
    SparseKeys,
    FitKeys,
    MemoryKeys,
    EvaluationKeys,
    ScoreKeys,
    SamplingKeys,
):
    """Keys of the section `args` that extensions declare."""
