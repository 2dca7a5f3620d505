"""Prompts of the golden files: an essay, a program and a conversation, each of more than 200 tokens."""

# ruff: noqa: E501 - the golden files depend on every line break

ESSAY = """The lighthouse at the northern tip of the island was built in 1863, after two merchant ships were lost on
the reef within the same winter. Its first keeper, a retired carpenter named Anders, lived there with his wife and
their four children. Every evening he climbed the hundred and twelve steps with a can of oil, trimmed the wicks, and
wound the clockwork that turned the great lens. In good weather the light could be seen from eighteen miles away.
Storms were another matter. During the gale of 1871 the sea broke over the rocks and flooded the kitchen, and the
family spent three days in the lamp room, taking turns to keep the mechanism moving by hand. When the supply boat
finally arrived, the keeper asked for nothing except more oil, a new kettle, and a book of songs. The logbook of
those years has survived. It is kept in the town museum today, and its pages are full of short, careful notes about
the wind, the birds that struck the glass at night, and the names of passing ships. Visitors often remark that the
handwriting never changes, not even on the worst days. The museum's curator believes that this steadiness tells us
something important about the keeper:"""

PROGRAM = '''import heapq
from collections import defaultdict


class Graph:
    """A weighted, directed graph with adjacency lists."""

    def __init__(self):
        self.edges = defaultdict(list)

    def add_edge(self, source, target, weight):
        if weight < 0:
            raise ValueError(f"negative weight: {weight}")
        self.edges[source].append((target, weight))

    def shortest_paths(self, start):
        """Distances from start to every reachable node (Dijkstra's algorithm)."""
        distances = {start: 0}
        queue = [(0, start)]
        while queue:
            distance, node = heapq.heappop(queue)
            if distance > distances.get(node, float("inf")):
                continue
            for neighbour, weight in self.edges[node]:
                candidate = distance + weight
                if candidate < distances.get(neighbour, float("inf")):
                    distances[neighbour] = candidate
                    heapq.heappush(queue, (candidate, neighbour))
        return distances

    def shortest_path(self, start, goal):
        """The nodes of a shortest path from start to goal, or None."""
'''

CONVERSATION = """<|im_start|>system
You are a patient teacher who explains physics to beginners with short, concrete examples.<|im_end|>
<|im_start|>user
I keep hearing that heavy and light objects fall at the same speed, but when I drop a feather and a coin, the coin
always lands first. My older brother says that the books are wrong, and my friend says that the feather is somehow
lighter than gravity. Neither of them could explain it to me. We also tried it with a flat sheet of paper and the same
sheet crumpled into a ball: the ball landed first, although it weighs exactly as much as the flat sheet! And when I put
the flat paper on top of a heavy book and dropped both together, the paper stayed on the book all the way down. Can you
tell me, step by step, what is going on in these three experiments, and what would happen on the Moon, where there is
no air? Please keep it under 200 words, and end with one question that I could try to answer myself.<|im_end|>
<|im_start|>assistant
"""

PROMPTS = {"essay": ESSAY, "program": PROGRAM, "conversation": CONVERSATION}
