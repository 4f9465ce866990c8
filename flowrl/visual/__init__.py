"""The visual wing: policies over diffusers pipelines, where they are evaluated, and the loop."""
