package cleanup

// RunBeside is what a plugin runs, for routers that are none.
var RunBeside = (*Cleaner).runBeside
