"""A policy server that speaks openpi's protocol: what is said (`protocol`), who said it (`sessions`), what is
answered (`inference`), and the socket (`server`). See docs/serve.md."""
