"""The steps of the ranks that share a transformers model."""

from __future__ import annotations

from fastdecode.spart.decoder.rank_steps import FollowingSPart, LeadSPart
from fastdecode.spart.hf.decoder import HFSPart


class HFLeadSPart(LeadSPart, HFSPart):
    """The S-Part of rank 0."""


class HFFollowingSPart(FollowingSPart, HFSPart):
    """The S-Part of another rank than 0."""
