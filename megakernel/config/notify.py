"""Messages to people about the events of a run: to whom, and about which."""

import re
from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from .errors import Problem
from .section import Section

Event = Literal["end", "failure", "restart", "preemption"]

EVENTS: tuple[Event, ...] = get_args(Event)


class Notify(Section):
    """Messages when a run ends, fails, restarts, or is stopped to make room: by webhook, by mail, or both."""

    webhook: str | None = None
    """Environment variable with the URL that gets each message as JSON, as Slack and Mattermost take it; None: none."""

    mail: list[str] = Field(default=[])
    """Addresses that get each message by mail."""

    mail_server: str = Field(default="localhost:25", pattern=r"^[A-Za-z0-9._-]+(:[0-9]{1,5})?$")
    """SMTP server that takes mail from the machine that sends it without a password, HOST[:PORT]."""

    events: list[Event] = Field(default=list(EVENTS), min_length=1)
    """Events that are told: end, failure, restart, preemption (also a time limit, after which the run goes on)."""

    def problems(self) -> Iterator[Problem]:
        """A URL in place of a variable's name, addresses that are none, and nobody to tell."""
        if self.webhook is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.webhook):
            # A URL may hold a secret, which the message would show.
            is_url = "://" in self.webhook
            value = f"{self.webhook.partition('://')[0]}://..." if is_url else self.webhook
            reason = "is saved with the run, which a URL must not be" if is_url else "is no variable's name"
            remedy = "put the URL into an environment variable and write its name, such as webhook: SLACK_URL"
            yield Problem("webhook", value, reason, remedy)
        for at, address in enumerate(self.mail):
            if not re.fullmatch(r"[^@\s<>,;]+@[^@\s<>,;]+", address) or not address.isascii():
                yield Problem(f"mail.{at}", address, "is no mail address", "write NAME@HOST")
        if self.webhook is None and not self.mail:
            yield Problem("webhook", "null", "and mail=[] tell nobody", "name a variable or an address")
