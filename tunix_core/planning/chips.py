"""TPU generations and slices of them: what a chip holds and how fast it is, by its data sheet."""

from __future__ import annotations

import dataclasses
import math
import re

from tunix_core.errors import ConfigError
from tunix_core.validation import require, require_range

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation. A device is what JAX calls one: a chip, or half of one."""

    name: str
    dimensions: int
    """Of the torus that its links make."""
    hbm_bytes: int
    """That the compiler gives a program on a device."""
    peak_flops: float
    """bfloat16 operations per second of a device."""
    link_bytes_per_second: float
    """Of all links of a device together, both directions."""
    devices_per_chip: int = 1

    @property
    def send_bytes_per_second(self) -> float:
        """One direction of all links: the most that a device can send."""
        return self.link_bytes_per_second / 2


# Peak and links of v5p, v6e and TPU7x: https://docs.cloud.google.com/tpu/docs/tpu7x. v5e:
# https://docs.cloud.google.com/tpu/docs/v5e. v4: https://docs.cloud.google.com/tpu/docs/v4, its links as in
# arXiv:2304.01433. Memory is what libtpu 0.0.42 says when it refuses a program that is too large.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            dimensions=3,
            hbm_bytes=int(15.25 * GIB),
            peak_flops=275e12 / 2,
            link_bytes_per_second=300e9,
            devices_per_chip=2,
        ),
        Chip(name="v5e", dimensions=2, hbm_bytes=int(15.75 * GIB), peak_flops=197e12, link_bytes_per_second=400e9),
        Chip(name="v5p", dimensions=3, hbm_bytes=int(95.74 * GIB), peak_flops=459e12, link_bytes_per_second=1200e9),
        Chip(name="v6e", dimensions=2, hbm_bytes=int(31.25 * GIB), peak_flops=918e12, link_bytes_per_second=800e9),
        Chip(
            name="tpu7x",
            dimensions=3,
            hbm_bytes=int(94.75 * GIB),
            peak_flops=2307e12 / 2,
            link_bytes_per_second=600e9,
            devices_per_chip=2,
        ),
    )
}

EXAMPLES = "v5p:4x4x8, v5e:2x4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Slices of one shape."""

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    def __post_init__(self) -> None:
        require(
            len(self.shape) == self.chip.dimensions and min(self.shape) >= 1,
            "--topology",
            self.name,
            f"{self.chip.dimensions} extents of at least 1 for {self.chip.name}",
            f"Write it like {EXAMPLES}.",
        )
        require_range("--slices", self.num_slices, 1)

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape) * self.num_slices

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices_per_chip

    def doubled(self) -> Topology:
        """Twice the chips: the shortest extent doubled."""
        shortest = self.shape.index(min(self.shape))
        shape = sorted(2 * n if i == shortest else n for i, n in enumerate(self.shape))
        return dataclasses.replace(self, shape=tuple(shape))


def parse_topology(text: str, num_slices: int = 1) -> Topology:
    """`v5p:4x4x8` -> 128 chips of v5p.

    Raises:
        ConfigError: no such generation or shape.
    """
    found = re.fullmatch(r"([\w]+):(\d+(?:x\d+)*)", text)
    if found is None or found[1] not in CHIPS:
        raise ConfigError(
            "--topology", text, f"GENERATION:AxB or AxBxC of {', '.join(CHIPS)}", f"Write it like {EXAMPLES}."
        )
    return Topology(chip=CHIPS[found[1]], shape=tuple(map(int, found[2].split("x"))), num_slices=num_slices)
