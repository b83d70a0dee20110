"""What people ask a chat model in one line: templates and the words that fill them, and whole questions. Pure data."""

from __future__ import annotations

from recipes.draft.templates import Templates, items

QUESTIONS: Templates = {
    "fact": (
        ("Who was {figure}?",),
        ("What is {figure} famous for?",),
        ("Tell me about {figure}.",),
        ("Write a short biography of {figure}.",),
        ("What is the capital of {place}?",),
        ("Tell me about {place}.",),
        ("What is {place} known for?",),
        ("Describe a typical day in {place}.",),
        ("What language do people speak in {place}?",),
        ("What is {topic}?",),
        ("What are {topic}?",),
        ("Explain {topic}.",),
        ("Explain {topic} in simple terms.",),
        ("How does {topic} work?",),
        ("Why is {topic} important?",),
        ("What is the history of {topic}?",),
        ("Give me some facts about {topic}.",),
        ("What is the difference between {pair}?",),
        ("Compare {pair}.",),
        ("Which is better, {pair}?",),
        ("Why {why}?",),
        ("Can you explain why {why}?",),
        ("What causes {cause}?",),
        ("What does the word '{word}' mean?",),
        ("Use '{word}' in a sentence.",),
    ),
    "how": (
        ("How do I {howto}?",),
        ("How can I {howto}?",),
        ("What is the best way to {howto}?",),
        ("I want to {howto}. Where do I start?",),
        ("Give me tips to {howto}.",),
        ("Can you help me {howto}?",),
        ("Write a step-by-step guide: how to {howto}.",),
        ("How long does it take to {howto}?",),
        ("How do I make {dish}?",),
        ("Give me a recipe for {dish}.",),
        ("What goes well with {dish}?",),
        ("Is {dish} healthy?",),
    ),
    "advice": (
        ("{problem} What should I do?",),
        ("{problem} Any advice?",),
        ("{problem} Can you help?",),
        ("What are the benefits of {habit}?",),
        ("What are the pros and cons of {habit}?",),
        ("Should I try {habit}?",),
        ("Suggest a {number}-day itinerary for {place}.",),
        ("What should I see in {place}?",),
        ("When is the best time to visit {place}?",),
        ("What are good gifts for {person}?",),
        ("Recommend a few books about {topic}.",),
        ("Suggest names for {thing}.",),
        ("Give me {number} ideas for {event}.",),
    ),
    "compose": (
        ("Write a {form} about {topic}.",),
        ("Write a {form} for {person}.",),
        ("Write a {form} set in {place}.",),
        ("Can you write a {form} about {thing}?",),
        ("Write a {form} that begins with: {sentence}",),
        ("Write a slogan for {thing}.",),
        ("Write a review of {thing}.",),
        ("Summarise {work}.",),
        ("What is {work} about?",),
        ("Who wrote {work}?",),
    ),
    "talk": (
        ("Hello!",),
        ("Hi, how are you?",),
        ("Tell me a joke about {topic}.",),
        ("Tell me a riddle.",),
        ("Let's talk about {topic}.",),
        ("What do you think about {habit}?",),
        ("Do you like {dish}?",),
        ("What can you do?",),
        ("I just came back from {place}.",),
        ("{problem}",),
    ),
    "sum": (
        ("What is {a} times {b}?",),
        ("What is {a} divided by {b}?",),
        ("What is {b} percent of {a}?",),
        ("Is {a} a prime number?",),
        ("I buy {number} {goods} at {b} dollars each. How much do I pay?",),
        ("Count from {b} to {a}.",),
    ),
    "program": (
        ("How do I write something that {task} in {code}?",),
        ("{code} code that {task}",),
        ("What is {concept} in programming?",),
        ("Explain {concept} with an example in {code}.",),
        ("When should I use {concept}?",),
        ("What is the difference between {code} and Python?",),
    ),
}
"""Of training prompts."""

FIGURES = items(
    """
    Albert Einstein; Isaac Newton; Charles Darwin; Leonardo da Vinci; Cleopatra; Julius Caesar; Napoleon Bonaparte; Abraham
    Lincoln; George Washington; Martin Luther King Jr.; Nelson Mandela; Mahatma Gandhi; Queen Victoria; Elizabeth I; Winston
    Churchill; Galileo Galilei; Nikola Tesla; Thomas Edison; Ada Lovelace; Alan Turing; Grace Hopper; Stephen Hawking; Jane
    Austen; Charles Dickens; Mark Twain; Virginia Woolf; Ernest Hemingway; Leo Tolstoy; Homer; Dante; Mozart; Beethoven; Bach;
    Frida Kahlo; Vincent van Gogh; Pablo Picasso; Michelangelo; Claude Monet; Aristotle; Plato; Socrates; Confucius; Genghis
    Khan; Marco Polo; Christopher Columbus; Ferdinand Magellan; Amelia Earhart; Neil Armstrong; Yuri Gagarin; Florence
    Nightingale; Louis Pasteur; Alexander Fleming; Gregor Mendel; Sigmund Freud; Karl Marx; Adam Smith; Rosa Parks; Joan of
    Arc; Alexander the Great; Muhammad Ali; Pele; Serena Williams; Walt Disney; Charlie Chaplin; Alfred Hitchcock; Anne Frank;
    Hypatia; Archimedes; Euclid; Pythagoras; Johannes Kepler; Michael Faraday; Rachel Carson; Rosalind Franklin
    """
)
PLACES = items(
    """
    France; Germany; Italy; Spain; Portugal; Greece; Turkey; Egypt; Morocco; Kenya; South Africa; Nigeria; India; China;
    Japan; South Korea; Thailand; Vietnam; Indonesia; Canada; Mexico; Brazil; Argentina; Chile; Peru; Cuba; Iceland; Norway;
    Sweden; Finland; Denmark; Poland; Hungary; Austria; Switzerland; the Netherlands; Belgium; Ireland; Scotland; New Zealand;
    Paris; London; Berlin; Vienna; Prague; Amsterdam; Barcelona; Venice; Florence; Athens; Istanbul; Cairo; Marrakesh; Dubai;
    Mumbai; Bangkok; Singapore; Hong Kong; Tokyo; Kyoto; Seoul; Sydney; New York; San Francisco; Chicago; New Orleans;
    Toronto; Buenos Aires; Rio de Janeiro; the Alps; the Sahara; the Amazon; the Grand Canyon; Antarctica; the Himalayas;
    Hawaii
    """
)
PAIRS = items(
    """
    cats and horses; tea and coffee; a crocodile and an alligator; butter and margarine; jam and jelly; a lake and a sea;
    stocks and bonds; a debit card and a credit card; a novel and a short story; RAM and storage; HTTP and HTTPS; a list and a
    tuple; a class and an object; speed and velocity; mass and weight; heat and temperature; a solid and a liquid; a comet and
    an asteroid; a planet and a star; mitosis and meiosis; plants and animals; a moth and a butterfly; a frog and a toad; a
    fruit and a vegetable; baking and roasting; yoga and stretching; a cold and an allergy; fear and anxiety; a republic and a
    monarchy; capitalism and socialism; a city and a town; a violin and a viola; opera and musicals; watercolour and oil
    paint; a laptop and a tablet; SQL and NoSQL; a compiler and an interpreter; supervised and unsupervised learning; a
    metaphor and a simile; affect and effect; renting and buying; trains and planes; summer and winter; beaches and mountains;
    books and films
    """
)
WHYS = items(
    """
    do leaves change colour; is grass green; do we dream; do we yawn; do dogs bark; do birds migrate; do bees make honey; is
    snow white; does ice float; does bread rise; do onions make us cry; does the moon change shape; are there seasons; do
    stars twinkle; do tides happen; is the sun hot; does metal rust; do magnets attract iron; do we need sleep; do people
    laugh; do babies cry; does hair turn grey; do we have fingerprints; do whales sing; did the dinosaurs die out; is exercise
    good for us; do prices rise; do people vote; do we pay taxes; do airplanes leave white trails; do boats float; do
    batteries run down; is biodiversity important; do cities grow; do languages change; is sugar bad for the teeth; do we get
    hungry; does music make us feel good; do volcanoes erupt; is the desert cold at night
    """
)
CAUSES = items(
    """
    rain; thunder; wind; tides; headaches; hiccups; allergies; stress; back pain; high blood pressure; unemployment; poverty;
    wars; traffic jams; air pollution; deforestation; droughts; floods; tornadoes; avalanches; rainbows; the northern lights;
    eclipses; rust; mould; insomnia; jet lag; muscle cramps; acne; the common cold
    """
)
WORDS = items(
    """
    serendipity; ephemeral; ubiquitous; resilience; melancholy; paradox; irony; empathy; benevolent; ambiguous; nostalgia;
    pragmatic; eloquent; meticulous; diligent; candid; frugal; zealous; altruism; hypothesis; metaphor; entropy; synergy;
    catalyst; dilemma; consensus; sovereign; obsolete; tangible; whimsical
    """
)
HOW_TO = items(
    """
    learn Spanish; learn to play the piano; learn to code; improve my handwriting; improve my memory; improve my writing; read
    faster; study for an exam; write an essay; write a résumé; prepare for an interview; find a job; change my career; start a
    blog; start a podcast; start a garden; grow tomatoes; keep plants alive; train a dog; adopt a cat; lose weight; gain
    muscle; eat healthier; drink more water; wake up early; fall asleep faster; stop procrastinating; stay motivated; manage
    my time; reduce stress; meditate; make friends; apologise to a friend; deal with a difficult colleague; give a
    presentation; speak in public; negotiate a price; save money; make a budget; pay off debt; invest my first money; buy a
    used car; change a tyre; fix a flat bicycle tyre; unclog a drain; paint a room; hang a picture; clean an oven; remove a
    stain; fold a shirt; iron a shirt; pack a suitcase; plan a trip; book cheap flights; plan a wedding; organise a party;
    organise my desk; declutter my home; set up a home network; secure my password; back up my computer; speed up my laptop;
    take better photos; edit a video; draw a face; knit a scarf; sew a button; bake a cake; cook rice; boil an egg; make
    bread; brew good coffee; chop an onion; sharpen a knife; make a fire; pitch a tent; read a map; tie a tie; swim better;
    run a marathon; do a push-up; stretch properly; choose a bicycle; ride a horse; play chess; solve a Rubik's cube; learn a
    dance; write a song; write a poem; write a novel; publish a book; cite a source; convert a file to PDF; make a
    spreadsheet; sort a list in Python; install Linux; use Git; debug my program; build a website; make an app; protect my
    privacy; recycle at home; save energy; reduce plastic; raise a child; help a friend who is sad; become a teacher; become a
    nurse; volunteer; vote; rent a flat; move to another country
    """
)
DISHES = items(
    """
    pancakes; an omelette; tomato soup; chicken soup; a green salad; spaghetti carbonara; lasagne; risotto; pizza; a burger;
    tacos; guacamole; chili; fried rice; sushi; ramen; a curry; dal; hummus; falafel; paella; a quiche; mashed potatoes; roast
    chicken; a stew; fish and chips; pumpkin pie; apple pie; chocolate cake; brownies; cookies; cheesecake; ice cream; a
    smoothie; lemonade; iced tea; granola; porridge; a sandwich; pesto; salsa; bread rolls; muffins; waffles; crêpes;
    dumplings; kimchi; vegetable stir-fry; lentil soup; stuffed peppers
    """
)
PROBLEMS = items(
    """
    I can't sleep.; My computer is very slow.; My phone battery drains fast.; I feel lonely in a new city.; I argue with my
    sister all the time.; My plant has yellow leaves.; My car makes a strange noise.; I have a headache.; I am always tired.;
    I forgot my friend's birthday.; My boss never listens to me.; I am bored.; I have too much work.; I don't understand
    algebra.; I am afraid of flying.; My cat scratches the sofa.; I spend too much money.; I can't concentrate.; My child
    doesn't want to go to school.; I want to quit my job.; I failed an exam.; My internet is slow.; I lost my wallet.; I am
    nervous about a speech.; My room is a mess.; I eat too many sweets.; My bread never rises.; My code does not compile.; I
    have writer's block.; My flatmate never cleans.; I don't know what to study.; I got a bad grade.; It is raining and we
    planned a picnic.; My friend is moving away.; I want to get fit.; I have nothing to wear for a wedding.; My neighbours are
    loud.; I have to give a toast.; My website has no visitors.; I feel stressed.
    """
)
HABITS = items(
    """
    running every day; walking to work; keeping a diary; reading before bed; fasting; a vegetarian diet; cold showers;
    learning an instrument; journaling; meditation; remote work; social media; online classes; electric cars; nuclear power;
    solar power; homeschooling; travelling alone; living abroad; minimalism; gardening; volunteering; weight lifting;
    swimming; drinking coffee; eating breakfast; taking naps; a four-day week; owning a dog; city life; country life; early
    retirement; public libraries; video games; artificial intelligence; space travel; recycling; tourism; team sports; video
    calls
    """
)
THINGS = items(
    """
    a coffee shop; a new smartphone; a bookshop; a running shoe; a pizza place; a hotel in the mountains; an e-bike; a kitten;
    a rock band; a space ship; a robot; a vegan restaurant; a yoga studio; a travel app; a cooking blog; a toy shop; a garden
    centre; a laptop; a vacuum cleaner; a water bottle; a backpack; a board game; a film about time travel; a museum; a
    co-working space; a dog groomer; a flower shop; a language school; a podcast about history; a science fair project
    """
)
FORMS = items(
    """
    poem; haiku; limerick; sonnet; short story; fairy tale; song; letter; speech; joke; riddle; dialogue; monologue; diary
    entry; news article; blog post; essay; tweet; advertisement; postcard; love letter; thank-you note; toast; bedtime story;
    mystery; science fiction story; ghost story; fable; scene of a play; film script; product description; social media post;
    newsletter; cover letter; complaint; invitation; apology; recommendation letter; summary; motto
    """
)
WORKS = items(
    """
    Macbeth; Othello; Pride and Prejudice; Moby-Dick; The Odyssey; The Iliad; Don Quixote; War and Peace; Crime and
    Punishment; The Great Gatsby; 1984; Animal Farm; Brave New World; Frankenstein; Dracula; The Hobbit; The Lord of the
    Rings; Harry Potter; Alice in Wonderland; Treasure Island; Robinson Crusoe; Gulliver's Travels; The Little Prince; The Old
    Man and the Sea; To Kill a Mockingbird; Great Expectations; A Christmas Carol; Jane Eyre; Wuthering Heights; Sherlock
    Holmes; The Jungle Book; Peter Pan; Cinderella; Snow White; Little Red Riding Hood; Star Wars; Casablanca; The Divine
    Comedy; Faust; The Art of War
    """
)
GOODS = items("apples; notebooks; tickets; pens; cups of coffee; books; shirts; plants; chairs; lamps; bottles; sandwiches")
CONCEPTS = items(
    """
    a variable; a function; a loop; an array; a hash table; a linked list; a stack; a queue; a binary tree; a graph; sorting;
    inheritance; polymorphism; an interface; a pointer; memory management; garbage collection; concurrency; a thread; a
    deadlock; a closure; a decorator; a generator; an exception; unit testing; continuous integration; an API; REST; JSON; a
    database index; a transaction; caching; big O notation; dynamic programming; a regular expression; a lambda; type
    checking; a package manager
    """
)

HELD_OUT_QUESTIONS = (
    "What's the capital of Australia and why isn't it Sydney?",
    "Give me a recipe for banana bread.",
    "How do I fix a leaky faucet?",
    "Write a haiku about autumn.",
    "Explain the difference between TCP and UDP.",
    "What are the benefits of drinking green tea?",
    "Can you write a resignation letter for me?",
    "Who was Marie Curie?",
    "How do airplanes fly?",
    "Write a Python function to compute the nth Fibonacci number.",
    "What is the best way to learn guitar as an adult?",
    "Tell me a joke about programmers.",
    "Summarize the causes of World War I.",
    "Why do cats purr?",
    "Suggest a 3-day itinerary for Rome.",
    "What does 'carpe diem' mean?",
    "How can I improve my sleep?",
    "Write an SQL query that finds the second highest salary.",
    "Explain quantum entanglement simply.",
    "What should I name my new puppy?",
    "How does a car engine work?",
    "Write a cover letter for a marketing position.",
    "What's the difference between weather and climate?",
    "Give me tips for saving money on groceries.",
    "Write a short horror story set in an abandoned hospital.",
    "How many planets are there in the solar system? List them.",
    "Explain recursion to a beginner.",
    "What are some good icebreaker questions for a team meeting?",
    "Why is the ocean salty?",
    "Write a product review for a pair of wireless headphones.",
    "How do I remove a red wine stain from a carpet?",
    "What were the main achievements of the Ottoman Empire?",
    "Translate 'Where is the train station?' into Spanish and French.",
    "What is machine learning used for?",
    "Write a motivational speech for a football team that is losing at half-time.",
    "How do I ask my boss for a raise?",
    "Describe how photosynthesis works.",
    "What is the plot of Hamlet?",
    "Write a regular expression for matching email addresses.",
    "How much water should I drink a day?",
    "I'm feeling sad today. What can I do?",
    "Explain how blockchain works.",
    "What are the symptoms of the flu?",
    "Write a birthday message for my grandmother who turns 80.",
    "How to make scrambled eggs fluffy?",
    "Compare cats and dogs as pets.",
    "What is the meaning of life?",
    "Write a bash script that backs up a folder every night.",
    "Tell me about the Great Barrier Reef.",
    "If I have 12 apples and give away a third of them, how many are left?",
    "How do I start a small online business?",
    "Write a limerick about a cat who loves to swim.",
    "What causes earthquakes?",
    "Give me a workout plan for beginners with no equipment.",
    "Explain the rules of baseball.",
    "What are black holes?",
    "Write a letter to my future self.",
    "How do solar panels produce electricity?",
    "What's a good book to read on a long flight?",
    "Explain inflation like I'm five.",
)
"""Written by hand, none of which is in the training data."""
