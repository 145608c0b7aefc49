"""8-bit floats with a sign, 4 bits of exponent and 3 of fraction (e4m3; Micikevicius et al. 2022)."""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
# A row of smaller numbers than this is scaled as if this were its largest: 448 / it stays finite.
LEAST = 1e-35
