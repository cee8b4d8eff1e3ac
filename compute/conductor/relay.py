"""Where a session's workers announce: they start before the desks that listen to them are built."""

from __future__ import annotations

from megloom.compute.conductor.episodes import EpisodeDesk
from megloom.compute.conductor.fields import FieldDesk
from megloom.compute.rollout.protocol import CallOpened, CallPrompt, FieldReady


class AnnouncementRelay:
    """Gives workers' announcements to the desks, which are built after the first worker has started."""

    target: EpisodeDesk | None = None
    fields: FieldDesk | None = None

    def call_opened(self, call: CallOpened) -> None:
        if self.target is not None:
            self.target.call_opened(call)

    def call_prompt(self, prompt: CallPrompt) -> None:
        if self.target is not None:
            self.target.call_prompt(prompt)

    def field_ready(self, field: FieldReady) -> None:
        if self.fields is not None:
            self.fields.field_ready(field)
