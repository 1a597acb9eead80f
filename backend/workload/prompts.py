"""What synthetic users say: a long system prompt that they can share, and questions of very different lengths."""

from __future__ import annotations

import random

# 381 tokens of SmolLM2: long enough that sharing it is worth seeing (23 blocks of 16).
SYSTEM = """\
You are the assistant of a small repair workshop for bicycles, radios and kitchen machines. People write to \
you before they come in, and you help them to find out what is wrong and whether they can mend it at home.

Follow these rules in every answer.
First, say in one sentence what you understood the problem to be, so that a misunderstanding shows at once.
Second, ask for at most one thing that you are missing. If you can already help, do not ask at all.
Third, give the steps in the order in which a careful person would do them, and name the tool for each step. \
Begin with what costs nothing: cleaning, tightening, looking, listening. Only then speak of parts that must \
be bought.
Fourth, warn about what can hurt: mains voltage, springs under tension, hot surfaces, sharp chain rings. A \
machine with a mains plug is unplugged before anybody opens it, and a capacitor is never touched.
Fifth, be honest about limits. If something needs a truing stand, an oscilloscope or a second pair of hands, \
say so and invite the person to the workshop, which is open on Tuesday and Thursday from four to eight and \
on Saturday from ten to two.
Sixth, prices: the workshop takes no money for advice. Parts cost what they cost us, and a donation is \
welcome.

Write plainly. Use short sentences and everyday words, explain a technical word when you first use it, and \
do not praise the question. When somebody is disappointed because a thing cannot be repaired, say what can \
still be used of it, and where it can be given back. Never invent a part number; tell people where on the \
thing the number is printed instead. If you are asked about something that has nothing to do with repairing, \
answer briefly and kindly, and leave it at that."""

QUESTIONS = (
    "My bicycle chain jumps when I pedal hard. What should I look at first?",
    "Why does bread rise?",
    "The radio hums even with the volume at zero.",
    "Name three uses for a broken umbrella.",
    "How do I true a wheel without a stand?",
    "My toaster does not stay down. The lever goes down and comes up again at once, and nothing gets warm. It "
    "is about ten years old and was never opened. Is that worth a repair, and what would you look at?",
    "Explain in simple words what a capacitor does.",
    "The brake squeals when it is wet.",
    "Write a short poem about a patient screwdriver.",
    "What is the difference between a fuse and a circuit breaker, and why would a house have both?",
    "My coffee machine takes twice as long as it did last year, the water is hard here and I never descaled it. "
    "I have vinegar and citric acid at home. Which one do I take, how much of it, how long does it stay in, and "
    "how often do I rinse afterwards? I also read that one of them can harm the seals, and I would like to "
    "understand why.",
    "Give me a checklist before a long bicycle tour.",
    "Is it safe to open a microwave oven?",
    "A spoke broke on the drive side of my rear wheel. Can I ride home with it? It is twelve kilometres, mostly "
    "flat, and I carry a bag of some eight kilograms on the rack above that wheel.",
    "Tell me a story about a lighthouse keeper who repairs clocks.",
    "What does it mean when a battery is rated at 2600 mAh?",
    "My mixer smells of burnt dust when it runs at the highest speed, but it works. The smell goes away after a "
    "minute. The brushes were changed two years ago by somebody at your workshop, and since then it had only "
    "light use, mostly cream and pancake dough. Should I stop using it, or is that the normal smell of new "
    "brushes wearing in?",
    "How often should I oil the chain?",
    "Summarise in two sentences why things are repaired less often than forty years ago.",
    "Which tools belong in a first tool box?",
    "The display of my kitchen scale shows only half of each digit.",
    "Why do tyres lose air even without a hole?",
    "I want to teach a class of ten-year-olds how a bicycle bell works. Suggest a plan for forty minutes with "
    "something to hold in the hand for every child, and say what I have to prepare the day before.",
    "Hello! Are you open on Saturday?",
    "My sewing machine skips stitches on stretchy fabric and nowhere else. I tried a new needle of the same "
    "kind, and I cleaned the bobbin case. The tension is as in the manual. What else can it be, and how do I "
    "find out which it is?",
    "What is a torque wrench good for?",
    "Translate 'the bearing is worn out' into French and German.",
    "The vacuum cleaner has lost its power, the bag is new and the filter is clean.",
    "Explain how a dynamo lights a lamp, step by step, for somebody who has never heard of a magnetic field.",
    "Which glue holds a broken plastic clip?",
    "List the parts of a hub gear.",
    "My grandmother's radio from 1958 has been in the attic for thirty years. It is complete, the wood is in "
    "good order, and one of the tubes is loose in its socket. I know that I must not simply plug it in. What is "
    "the order in which somebody who knows what he is doing would bring such a radio back to life, and which of "
    "those steps could I do myself without any danger before I bring it to you?",
)


def system_prompt(user: int, *, broken: bool) -> str:
    """The shared system prompt; `broken` puts a line of the user's own on top, and no block of it can be shared."""
    return f"Customer number {user * 7919 % 100_000} writes to you.\n\n{SYSTEM}" if broken else SYSTEM


def question(lots: random.Random) -> str:
    """One question, or a short list of them: from some 5 to some 300 tokens."""
    if lots.random() < 0.8:
        return lots.choice(QUESTIONS)
    chosen = lots.sample(QUESTIONS, lots.randint(2, 4))
    return "\n".join(f"{i}. {text}" for i, text in enumerate(chosen, start=1))


def output_tokens(lots: random.Random, least: int, most: int) -> int:
    """Lengths that spread over their orders of magnitude: many short answers, a few long ones."""
    return round(least * (most / least) ** lots.random())
