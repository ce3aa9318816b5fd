"""The steps of the ranks that share a transformers model."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.spart.decoder.rank_steps import Followers, FollowingSPart, LeadSPart
from fastdecode.spart.hf.decoder import HFSPart
from fastdecode.spart.hf.model import HFModel
from fastdecode.transports.base import DataPath


class HFLeadSPart(LeadSPart, HFSPart):
    """The S-Part of rank 0."""

    def __init__(self, model: HFModel, links: Sequence[DataPath], followers: Followers, state_slots: int = 0):
        super().__init__(model, links, followers, state_slots)  # type: ignore[arg-type]


class HFFollowingSPart(FollowingSPart, HFSPart):
    """The S-Part of another rank than 0."""

    def __init__(self, model: HFModel, rank: int):
        super().__init__(model, rank)  # type: ignore[arg-type]
