"""Adapters: what a diffusers pipeline has to do to be a Policy.  The only place that imports diffusers."""
