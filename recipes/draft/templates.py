"""What prompts are made of: templates by kind, for training and held out, and the words that fill them. Pure data.

A template is a tuple of turns: the user's, the assistant's, the user's, and so on; it ends with the user's.
"""

from __future__ import annotations

Templates = dict[str, tuple[tuple[str, ...], ...]]


def items(text: str) -> tuple[str, ...]:
    """Return what semicolons separate, each on one line."""
    return tuple(" ".join(item.split()) for item in text.split(";"))


TRAIN: Templates = {
    "explain": (
        ("Explain {topic} to {audience}.",),
        ("What is {topic}? Answer {style}.",),
        ("Why does {topic} matter? Write {number} sentences.",),
        ("How does {topic} work, and where is it used?",),
        ("Tell me something surprising about {topic}.",),
        ("Describe the history of {topic} {style}.",),
        ("What are common misconceptions about {topic}?",),
    ),
    "list": (
        ("Give me {number} tips about {topic}.",),
        ("List {number} advantages and disadvantages of {topic}.",),
        ("Write a checklist of {number} steps for somebody who starts with {topic}.",),
        ("Name {number} questions that an interviewer could ask about {topic}, with answers.",),
    ),
    "write": (
        ("Write a short story about {topic} {style}.",),
        ("Write a poem about {topic} with {number} lines.",),
        ("Write a product description for {topic}, {style}.",),
        ("Write a dialogue between {person} and {audience} about {topic}.",),
        ("Write the introduction of a blog post about {topic}.",),
    ),
    "email": (
        ("Write an e-mail to {person} about {event}.",),
        ("Write a polite e-mail that asks {person} to reply about {event} by Friday.",),
        ("Draft a thank-you note to {person} after {event}.",),
    ),
    "code": (
        ("Write a {code} function that {task}.",),
        ("Write a {code} program that {task}, with comments.",),
        ("Show me how to write unit tests for a {code} function that {task}.",),
        ("Explain what this Python code does:\n\n{source}",),
        ("Write a docstring for this code:\n\n{source}",),
    ),
    "arithmetic": (
        ("What is {a} + {b}? Show your steps.",),
        ("A box holds {a} apples. I take out {b} of them each day. After how many days is it empty?",),
        ("Compute {a} * {b}.",),
        ("If a train travels {a} kilometres in {b} hours, how fast is it?",),
    ),
    "translate": (
        ('Translate to {language}: "{sentence}"',),
        ('How do you say "{sentence}" in {language}? Explain the words.',),
    ),
    "passage": (
        ("Summarise the following text in {number} sentences:\n\n{prose}",),
        ("Rewrite this text in simpler words:\n\n{prose}",),
        ("What are the key points of this text?\n\n{prose}",),
        ("Answer from this text only: what is it about?\n\n{prose}",),
    ),
    "edit": (
        ('Rewrite this sentence {style}: "{sentence}"',),
        ('Continue this text: "{sentence}"',),
    ),
    "turns": (
        (
            "Hi! Can you help me with {topic}?",
            "Of course! What would you like to know about {topic}?",
            "Begin with the basics.",
        ),
        (
            "Tell me about {topic}.",
            "That is a broad subject. Is there a part that interests you most?",
            "How do I get started?",
        ),
        ('Say "{sentence}" in another way.', "{sentence}", "No, {style} please."),
        ("What is {a} - {b}?", "Let me compute that.", "Please explain each step, too."),
    ),
    "system": (
        ("system: You are {person}, and you answer {style}.", "What do you think about {topic}?"),
        ("system: You answer in bullet points.", "Plan {event} for me."),
    ),
}

HELD_OUT: Templates = {
    "compare": (
        ("I can't decide whether to spend my time on {topic}. What speaks for it and what against?",),
        ("Compare {topic} now with what it was a hundred years ago.",),
        ("Imagine that {topic} did not exist. What would be different?",),
    ),
    "teach": (
        ("Plan a lesson about {topic} that takes an hour.",),
        ("Make a quiz with {number} questions about {topic}.",),
    ),
    "speech": (
        ("Write a speech that {person} could give at {event}.",),
        ("Write an advertisement for {event} {style}.",),
    ),
    "debug": (
        ("My {code} code, which {task}, gives wrong results. What should I look at?",),
        ("Find possible bugs in this code:\n\n{source}",),
        ("Which {code} library would you use to build something that {task}?",),
    ),
    "reason": (
        ("I had {a} coins and gave each of {b} friends three of them. What is left?",),
        ("Which is larger, {a} squared or {b} cubed?",),
    ),
    "quote": (
        ("Turn this into a list of facts:\n\n{prose}",),
        ("Write a headline and a first paragraph for a news article on this:\n\n{prose}",),
        ('What might the author of "{sentence}" have felt?',),
    ),
    "follow": (
        ("I'd like to talk about {event}.", "Sure, go ahead.", "What could go wrong, and what should I do about it?"),
        ("Recommend a book on {topic}.", "Do you prefer something introductory?", "Yes, and tell me why you chose it."),
    ),
}

STYLES = (
    "in one paragraph",
    "in simple words",
    "in a formal tone",
    "in a friendly tone",
    "with an example",
    "with a metaphor",
    "as a list",
    "humorously",
    "briefly",
    "in detail",
    "step by step",
    "as if it were a fairy tale",
)
AUDIENCES = (
    "a child",
    "a student",
    "an engineer",
    "my grandmother",
    "a beginner",
    "an expert in another field",
    "a customer",
    "a new colleague",
)
PERSONS = (
    "my manager",
    "a landlord",
    "a teacher",
    "an old friend",
    "a client",
    "the city council",
    "a doctor",
    "a pirate",
    "a historian",
    "a football coach",
    "a chef",
    "a neighbour",
)
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Latin")
CODE_LANGUAGES = ("Python", "JavaScript", "Java", "C", "Rust", "Go", "SQL", "Bash")
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a concise assistant.",
    "You are a patient teacher.",
    "Answer truthfully and say so if you are not sure.",
    "You are an experienced editor.",
    "You are a friendly guide who likes examples.",
)
TOPICS = items(
    """
    photosynthesis; gravity; the water cycle; black holes; vaccines; DNA; plate tectonics; evolution; climate change;
    electricity; solar panels; batteries; the internet; search engines; machine learning; neural networks; operating systems;
    databases; compilers; encryption; blockchain; programming; open source software; version control; cloud computing; robotics;
    self-driving cars; 3D printing; the Roman Empire; the French Revolution; the Industrial Revolution; ancient Egypt; the Silk
    Road; the Renaissance; the printing press; the moon landing; the Cold War; democracy; constitutions; human rights;
    inflation; interest rates; supply and demand; taxes; budgeting; investing; insurance; starting a business; marketing; public
    speaking; job interviews; time management; teamwork; leadership; negotiation; learning a language; reading habits; writing a
    novel; poetry; Shakespeare; jazz; classical music; the guitar; painting; photography; film making; theatre; architecture;
    bridges; gardening; composting; house plants; bees; dogs; cats; horses; whales; birds; dinosaurs; the rainforest; coral
    reefs; deserts; volcanoes; earthquakes; hurricanes; the ocean; mountains; rivers; hiking; camping; running; swimming; yoga;
    cycling; football; chess; board games; cooking pasta; baking bread; coffee; tea; chocolate; cheese; healthy food; sleep;
    stress; meditation; friendship; parenting; travelling by train; city planning; public transport; recycling; clean water;
    space stations; telescopes; Mars; time zones; calendars; maps; mathematics; prime numbers; probability; statistics;
    geometry; infinity; logic; philosophy; ethics; psychology; memory; dreams; emotions; museums; libraries; fashion; mythology;
    folk tales; dragons; detectives; lighthouses; clocks; umbrellas; bicycles; ships; aeroplanes; magnets; glass; paper; salt;
    gold; wool; wind; snow; rainbows; the sun
    """
)
CODE_TASKS = items(
    """
    reverses a string; finds the largest number in a list; counts words in a file; checks whether a number is prime; sorts a
    list of names; removes duplicates from a list; computes the factorial of a number; merges two sorted lists; reads a CSV file
    and adds up a column; checks whether a string is a palindrome; generates Fibonacci numbers; converts Celsius to Fahrenheit;
    validates an e-mail address; downloads a web page; implements a stack; implements a queue; does a binary search; parses
    JSON; prints a multiplication table; counts the vowels in a text; finds the shortest path in a graph; renames all files in a
    folder; rolls two dice; encrypts a text with a Caesar cipher; computes the mean and the median; draws a histogram as text;
    finds the most common word; groups records by date; retries a request with back-off; caches results of a function
    """
)
SENTENCES = items(
    """
    The train leaves at nine in the morning.; I would like a cup of coffee, please.; She has lived in this town for twenty
    years.; The meeting was moved to next Thursday.; It rained the whole day, but nobody minded.; We are looking for a quiet
    place to work.; The children found an old map in the attic.; Could you tell me where the library is?; He forgot his keys
    again.; The report is due at the end of the month.; Once upon a time there was a small village by the sea.; The door was
    open, and there was light inside.; Our customers expect a fast answer.; Learning takes time and patience.; The bridge was
    built more than a century ago.; They decided to go by bicycle.; My sister is a better cook than I am.; Nobody knew where the
    noise came from.; The experiment failed, which taught us a lot.; Spring came early that year.
    """
)
EVENTS = items(
    """
    a birthday party; a project that is late; a job application; a broken heating; a school trip; a wedding; a meeting next
    week; a lost parcel; a holiday in the mountains; a conference; a charity run; a team lunch; a house move; a product launch;
    a book club; a summer festival; a job offer; a refund; a garden party; a training course
    """
)
