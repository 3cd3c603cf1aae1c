"""The denoising networks, the diffusion process and the sampler."""
