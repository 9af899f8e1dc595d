"""The batch layout: the one definition that data, passes, losses and the step share. Imports nothing heavy.

B rows, T positions. Rows hold whole documents or pieces of them (method.md section 6): `segment_ids` tell them apart,
`positions` count from 0 within each piece, so that `positions == 0` marks the tokens that are always plain.
"""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Arrays of shape (B, T). A training batch on the device has all rows of the optimizer step."""

    tokens: Any  # int32, the inputs
    targets: Any  # int32, what each position must predict; any value where the weight is 0
    weights: Any  # float32, the token's weight in every pass's loss; 0 for padding and masked targets
    segment_ids: Any  # int32, the document's number within its row from 1; 0 is padding
    positions: Any  # int32, from 0 within the document's piece in this row
