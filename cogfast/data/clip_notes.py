"""Describes how the clips of a run differ from what players show of their files, by the headers that are read
at the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cogfast.core.values import counted
from cogfast.data.video.clip import ClipSettings

# Readers do not follow these: {kind of clips: their line, with the command that converts them}
NOTES = {
    "hdr": "have HDR or wide colours (PQ, HLG, BT.2020, P3) and are read as BT.709; convert them: ffmpeg -i IN -vf "
    "zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=709,tonemap=hable,zscale=t=709:m=709:r=tv,format=yuv420p OUT",
    "interlaced": "are interlaced, and both fields are one picture; convert them: ffmpeg -i IN -vf bwdif=0 OUT",
    "alpha": "have transparency, which is dropped; put them onto black: ffmpeg -i IN -vf "
    "premultiply=inplace=1,format=yuv420p OUT",
    "streams": "have several video streams, of which the default or first one is read; keep one: ffmpeg -i IN -map "
    "0:v:1 -c copy OUT",
}
_TEXTS = NOTES | {
    "cut": "are cropped to the shape of {shape}, which cuts {span}% of the picture; data.params.buckets of their "
    "shapes keep more, and resize=stretch squeezes them",
    "speed": "run at {span} times their speed; data.params.frame_selection=timestamp picks frames by time",
    "slow": "have fewer frames per second than are read, down to {span}: frames will be repeated; lower "
    "data.params.fps",
    "padded": "are shorter than the clips that are read: the last frame is repeated {span} times; "
    "data.params.short_clips=skip leaves them out",
}


class ClipNotes(dict[str, tuple[int, float, float, int]]):
    """{kind of clips: (their number, the least and the greatest value, the first sample)}. "short": seconds of clips
    that are too short, "fitting": frames that they have."""

    def add(self, kind: str, number: int, least: float, most: float, first: int) -> None:
        old = self.get(kind, (0, least, most, first))
        low, high = min(old[1], least), max(old[2], most)
        self[kind] = old[0] + number, low, high, min(old[3], first)

    def lines(
        self, total: int, settings: ClipSettings, name: Callable[[int], str]
    ) -> Iterator[str]:
        """Yield a line for each kind of the clips that are read. total: number of clips."""
        shape = "x".join(map(str, settings.video_size)) if settings.buckets is None else "a bucket"
        for kind in filter(self.__contains__, _TEXTS):
            number, least, most, first = self[kind]
            span = " to ".join(dict.fromkeys(f"{value:.3g}" for value in (least, most)))
            text = _TEXTS[kind].format(shape=shape, span=span)
            yield f"{number} of {counted(total, 'clip')} {text} (first: {name(first)})"

    def too_short(self, total: int, settings: ClipSettings) -> str:
        """Return how many clips are left out as they are too short, and how to read them; "" if none is."""
        if "short" not in self:
            return ""
        wanted = min((size.num_frames for size in settings.sizes if size.num_frames > 1), default=1)
        fit = 8 * ((int(self["fitting"][1]) - 1) // 8) + 1  # what models take
        key = "data.params.max_num_frames=" if settings.buckets is None else "a bucket of frames="
        fix = f"{key}{fit} takes all, " if fit > 1 else ""
        return (
            f"{self['short'][0]} of {counted(total, 'clip')} are shorter than {wanted} frames at {settings.fps:g}/s "
            f"({wanted / settings.fps:.1f} s; shortest {self['short'][1]:.1f} s): {fix}"
            "data.params.short_clips=pad repeats the last frame"
        )
