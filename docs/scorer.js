// The order of the search's results. A page has words for which it comes first, in its
// index (IndexWords in conf.py). Of pages that have the words in their text, those for
// users come before the others.
var Scorer = {
  score: ([page, _title, _anchor, _description, score, _file, kind]) =>
    kind === "text" && /^(index|contents|changelog|contributing|design|adding|evaluator|serving|api\/index|notebooks)/.test(page)
      ? score / 2
      : score,
  // The rest are Sphinx's own numbers.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
