"""What a card has launched."""

from llmcli.kernels.device import Device


def launched_by(card: Device) -> list[tuple[str, str]]:
    """Stem and name of each launch since `card.noted` became a list."""
    assert card.noted is not None
    return [starter.label for starter, _ in card.noted if starter.label is not None]
