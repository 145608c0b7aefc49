"""The data sets of a run that trains from a latent cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cogfast.core.values import counted
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import PackedStrings
from cogfast.data.video.clip import ClipSettings
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.cache.cache_key import cache_specs
from cogfast.extensions.cache.entries import (
    CachedVideos,
    Entries,
    Spec,
    difference,
    find_entries,
    folders_of,
)
from cogfast.extensions.cache.entry_keys import (
    Sources,
    hash_text,
    sample_key,
    source_files,
    used_samples,
)
from cogfast.extensions.stores.store import StoreError
from cogfast.model.keys import ModelKeys
from cogfast.train.assembly import Datasets
from cogfast.train.frozen_encoders import EncodeOverrides
from cogfast.train.keys import TrainKeys


def read_from_cache(
    datasets: Datasets,
    sections: Mapping[str, Mapping],
    allow_import: Sequence[str],
    args: TrainKeys,
    model: ModelKeys,
    groups: ProcessGroups,
    overrides: EncodeOverrides,
) -> Datasets:
    """Return the data sets with their samples read from args.latent_cache, if it is set.

    sections, allow_import: as for `cache_specs`. Rank 0 looks for the entries. ValueError if any is missing.
    Call it after buckets are assigned.
    """
    if args.latent_cache is None:
        return datasets
    # Preflight refuses a cache for other data sets.
    train, valid = datasets.train, datasets.valid
    assert isinstance(train, CaptionedVideos), f"a cache of {type(train).__name__}"
    assert valid is None or isinstance(valid, CaptionedVideos), f"a cache of {type(valid).__name__}"
    every = [train] if valid is None else [train, valid]
    try:
        about = partial(cache_specs, sections, allow_import, args, model, overrides=overrides)
        entries, keys = groups.on_main(lambda: _find(every, args, about))
    except StoreError as error:
        raise ValueError(f"args.latent_cache: {error}") from None
    cached = [CachedVideos(v, entries, of_v) for v, of_v in zip(every, keys, strict=True)]
    return Datasets(cached[0], None if valid is None else cached[1])


def _find(
    every: list[CaptionedVideos],
    args: TrainKeys,
    specs_of: Callable[[ClipSettings], dict[str, Spec]],
) -> tuple[dict[str, Entries], list[dict[str, PackedStrings]]]:
    """Return the entries by kind, and the keys of each data set: by the names of
    `CaptionedVideos.encoded`."""
    assert args.latent_cache is not None, "the caller reads from it"
    folder = args.latent_cache
    sources = Sources(folder)
    specs = specs_of(every[0].settings)
    changed: list[str] = []
    for v in every:
        changed += sources.changed(source_files(v, used_samples(v)), v.settings.trust_index)
    keys_of = lambda one: PackedStrings(sample_key(one, i, sources) for i in range(len(one)))
    keys = [{name: keys_of(one) for name, one in v.encoded.items()} for v in every]
    used = [(number, i) for number, v in enumerate(every) for i in used_samples(v)]
    clips = [tuple(of_one[i] for of_one in keys[number].values()) for number, i in used]
    texts = [hash_text(every[number].captions[i]) for number, i in used]
    wanted = {"video": set().union(*clips), "text": set(texts)}
    entries, there = {}, {}
    for kind, spec in specs.items():
        entries[kind], there[kind] = find_entries(folder, kind, spec, wanted[kind])
        there[kind] |= entries[kind].ask(wanted[kind] - there[kind].keys())
    pairs = zip(clips, texts, strict=True)
    num_usable = sum(
        text in there["text"] and all(clip in there["video"] for clip in own) for own, text in pairs
    )
    if num_usable == len(used):
        return entries, keys
    differences = dict.fromkeys(difference(folder, kind, spec) for kind, spec in specs.items())
    why = "; ".join(filter(None, differences))
    if not folders_of(folder, "video"):
        why = "the folder has no cache"
    elif not why and changed:
        why = f"{counted(len(changed), 'video')} changed or moved since caching"
    text = f"args.latent_cache={folder}: {why or 'not all are encoded'}: {num_usable} of {len(used)} usable"
    raise ValueError(f"{text}; run `cogfast cache` again with this configuration")
