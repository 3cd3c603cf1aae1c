"""Recipes, rows, batches and the loop that makes a policy of them."""
