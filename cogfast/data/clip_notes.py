"""Describes how far the clips of a run differ from their videos: in speed and in what is cut off.

Frames spread over a video (frame_selection=uniform) change its speed, and resize=crop cuts off a
part of a picture of another shape. Both are computed from the headers that are read at the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cogfast.data.video.settings import Bucket, ClipSettings
from cogfast.schema.values import counted

_SAME_SPEED = 0.05  # share of the speed below which a change is not worth a line
_SAME_SHAPE = 0.005  # share of the picture


@dataclass(slots=True)
class ClipNotes:
    """Collects the clips of a data set with `add`; `lines` describes them.

    seconds: durations of the clips that are spread over their frames. speeds: how fast they are
    shown. cuts: shares of the picture that are cut off, where that is noticeable.
    """

    num_clips: int = 0
    num_spread: int = 0
    num_padded: int = 0
    num_cut: int = 0
    seconds: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    rates: set[float] = field(default_factory=set)
    cuts: list[float] = field(default_factory=list)
    frame_counts: set[int] = field(default_factory=set)
    sizes: set[str] = field(default_factory=set)

    def add(
        self,
        num_frames: int,
        fps: float,
        size: tuple[int, int],
        settings: ClipSettings,
        times: int = 1,
    ) -> None:
        """Add a clip, or several that are alike.

        num_frames, fps, size: of the video or of the part that is used. times: number of clips.
        """
        self.num_clips += times
        wanted = settings.max_num_frames
        if settings.frame_selection == "uniform":
            stride = max(num_frames // wanted, 1)
            self.seconds.append(num_frames / fps)
            self.speeds.append(stride / fps * settings.fps)
            self.rates.add(settings.fps)
            self.frame_counts.add(wanted)
            self.num_spread += times
            self.num_padded += times * (num_frames < wanted)
        if settings.resize == "crop":
            self.sizes.add("x".join(map(str, settings.video_size)))
            cut = 1 - shown_share(*size, Bucket(wanted, *settings.video_size))
            if cut > _SAME_SHAPE:
                self.cuts.append(cut)
                self.num_cut += times

    def lines(self) -> list[str]:
        """One line on speeds and one on pictures, where there is something to say."""
        lines = []
        is_changed = any(abs(speed - 1) > _SAME_SPEED for speed in self.speeds)
        if is_changed or self.num_padded:
            text = (
                f"frames spread over {counted(self.num_spread, 'clip')} of {_span(self.seconds)} s: "
                f"{_span(self.frame_counts, 0)} frames shown at {_span(self.rates, None)} fps run at "
                f"{_span(self.speeds)} times the clip's speed; "
                "data.params.frame_selection=timestamp (cogfast finetune: --fps) picks frames by time"
            )
            lines.append(text + _padded(self.num_padded))
        if self.cuts:
            shape = self.sizes.pop() if len(self.sizes) == 1 else "their bucket"
            shares = _span([100 * cut for cut in self.cuts], 0)
            lines.append(
                f"cropping {self.num_cut} of {counted(self.num_clips, 'clip')} to the shape of {shape} "
                f"cuts {shares}% of the picture (data.params.resize=stretch, in cogfast finetune "
                "--resize stretch, squeezes it instead)"
            )
        return lines


def shown_share(height: int, width: int, size: Bucket) -> float:
    """The share of a picture that is left when it covers `size` and the centre is cropped, 0 to 1."""
    # The crop cuts one axis only: the other is scaled to fit exactly.
    scale = max(size.height / height, size.width / width)
    return (size.height / scale) * (size.width / scale) / (height * width)


def _padded(number: int) -> str:
    return f". {number} {'is' if number == 1 else 'are'} padded." if number else ""


def _span(values: Iterable[float], digits: int | None = 1) -> str:
    """Format the range of values; digits: behind the point, None for as many as needed."""
    low, high = (
        f"{value:g}" if digits is None else f"{value:.{digits}f}"
        for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"
