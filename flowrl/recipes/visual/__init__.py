"""Recipes that align image and video generators."""
