"""The algorithms' mathematics: arrays in, arrays out, in the papers' symbols."""
