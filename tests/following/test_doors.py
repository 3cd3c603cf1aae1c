"""Four doors, one room: the library, evaluation, the server and the lab plan the same from the same frames."""

from __future__ import annotations

import numpy as np
import pytest

import memcorr
from memcorr.correspondence.matcher import load_matcher
from memcorr.demos.store import Store
from memcorr.evaluation.controllers import PolicyController
from memcorr.evaluation.evaluate import usual
from memcorr.evaluation.intervention import Intervention
from memcorr.evaluation.rollout import SLOTS, Decision, Job, Memory
from memcorr.lab.episode import Episode, Guide
from memcorr.serve.inference import Inference
from memcorr.serve.protocol import Message
from memcorr.serve.sessions import Library, Session
from memcorr.spec import SPEC
from memcorr.worlds.scenes import evaluation_scenes
from memcorr.worlds.world import World

SWAP = 16  # control steps after which the reference is exchanged


@pytest.mark.long
def test_every_door_leads_through_the_same_room(store: Store, world: World) -> None:
    """The servo, whose phase hangs on all it has seen, with the reference exchanged in mid-episode.

    LeRobot's door is opened by `test_lerobot_plugin.py`, where LeRobot is.
    """
    policy, matcher, scene = memcorr.load_policy("servo"), load_matcher("embedded"), evaluation_scenes("combined")[0]
    opening, closing = (store.demonstration(0, task) for task in ("open", "close"))
    evaluated = PolicyController(policy, {"open": opening, "close": closing}, usual("servo", Intervention(swap=SWAP)))
    follower = policy.follow(closing, matcher, SLOTS)
    served = Inference(policy, matcher, SLOTS)
    library, session = Library(store, served.matcher), Session()
    guides = [
        Guide(d, {"servo": PolicyController(policy, {d.task: d}, usual("servo"), SLOTS)}) for d in (closing, opening)
    ]
    lab = Episode(world, scene, guides[0])
    memory, phases = Memory(), list[int]()
    for k, elapsed in enumerate(range(0, 40, SPEC.executed)):
        if elapsed == SWAP:
            lab.follow(guides[1])
            follower.swap(opening)
        lab.look()
        answer_of_lab = lab.now.slots[0].answer
        world.restore(scene, lab.now.slots[0].state, lab.now.slots[0].place)
        frame = world.observe()
        decision = Decision(Job(scene, "open"), k, elapsed, frame, world.T_world_object, world.robot_state, memory)
        (answer,) = evaluated.decide([decision])
        memory = answer.memory
        session = session.heard(Message(frame, "pair-000-close" if elapsed < SWAP else "pair-000-open"), library)
        look = session.query(Message(frame))
        assert look is not None
        (from_server,) = served.plan([look], [0])
        from_server, session = session.executed(from_server, look.observation, policy.design)
        from_library = follower.plan(frame, elapsed)
        assert answer.plan is not None and answer_of_lab is not None and answer_of_lab.plan is not None
        for plan in (from_library, from_server, answer_of_lab.plan):
            assert plan.phase == answer.plan.phase
            assert np.array_equal(plan.actions, answer.plan.actions)
        phases.append(answer.plan.phase or 0)
        for _ in range(SPEC.executed):
            lab.advance()
    assert phases[0] == 0 and phases[1] > 0 and len(set(phases)) > 2
