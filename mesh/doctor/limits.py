"""How long an examination may take: each answer, each login, and all of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds. Regions and checks run at once, so these don't add up over regions."""

    greeting_s: float = 3.0
    """For a nats-server to greet, and to let us in: a lost packet is sent again after one."""
    answer_s: float = 2.0
    """For a peer region's answer to a question: a long round trip is a quarter of a second."""
    login_s: float = 8.0
    """For all that is done under one login, but for listening: JetStream may take 5 s of it."""
    all_s: float = 12.0
    """For the whole examination, but for listening: the above, and a second to end connections."""

    def session_s(self, listen_s: float) -> float:
        """All that is done under one login."""
        return listen_s + self.login_s

    def total_s(self, listen_s: float) -> float:
        """The whole examination."""
        return listen_s + self.all_s


LIMITS = Limits()
