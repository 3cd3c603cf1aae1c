"""All that knows a simulator or a door: physics, pictures, scenes, the scripted expert."""
