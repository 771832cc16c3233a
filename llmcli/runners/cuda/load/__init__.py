"""How weights come to the card, from files to tiles."""
