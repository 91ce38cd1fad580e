"""The table of draft proposers. Adding one takes one file and one row here."""

from __future__ import annotations

from stoker.base.registry import Registry
from stoker.runtime.schedule.proposers.drafter_tokens import DrafterTokens
from stoker.runtime.schedule.proposers.ngram import NgramProposer
from stoker.runtime.schedule.proposers.no_drafts import NoDrafts
from stoker.runtime.schedule.proposers.proposer import Proposer
from stoker.runtime.schedule.proposers.supplied import SuppliedDrafts

PROPOSERS: Registry[type[Proposer]] = Registry("proposer")
PROPOSERS.add("none", NoDrafts)
PROPOSERS.add("ngram", NgramProposer)
PROPOSERS.add("request", SuppliedDrafts)
PROPOSERS.add("drafter", DrafterTokens)
