"""A card that is played below torch's dispatcher, so that what is written for cards runs where there is none."""
