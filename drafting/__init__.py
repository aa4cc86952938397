"""Guessers that are models, and how many guesses pay."""
