// Package model_test has Spin check the model of the inbox, and refuse those that are broken on purpose.
package model_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// mutants maps the definitions that break the model to a property that each violates. README.md explains them.
var mutants = map[string]string{
	"CHECK_THEN_INSERT":    "effect_at_most_once",
	"EFFECT_OUTSIDE_TX":    "effect_at_most_once",
	"CLAIM_OUTSIDE_TX":     "effect_eventually_once",
	"SKIP_IN_FLIGHT":       "effect_eventually_once",
	"COMMIT_ERROR_IGNORED": "no_ack_before_commit",
	"ACK_BEFORE_COMMIT":    "no_ack_before_commit",
	"NO_RECORDED_OUTPUTS":  "output_eventually",
	"MARK_BEFORE_PUBLISH":  "output_eventually",
	"FRESH_UUIDS":          "output_has_one_uuid",
	"PUBLISH_IN_HANDLER":   "no_output_before_commit",
	"NACK_DUPLICATES":      "queue_empties",
}

var (
	property   = regexp.MustCompile(`(?m)^ltl (\w+)`)
	definition = regexp.MustCompile(`(?m)^#ifdef (\w+)`)
	errorCount = regexp.MustCompile(`errors: (\d+)`)
	unreached  = regexp.MustCompile(`(?m)^\s+inbox\.pml:\d+, state \d+, .*$`)
)

// A property or a mutant that is in the model and not in the table, or the other way about, is not checked.
func TestEveryGuaranteeHasItsMutant(t *testing.T) {
	t.Parallel()
	source := read(t)
	defined, guarantees := names(definition, source), names(property, source)
	for _, name := range defined {
		if mutants[name] == "" {
			t.Errorf("mutant %s has no property to violate", name)
		}
	}
	violated := make(map[string]bool)
	for name, guarantee := range mutants {
		violated[guarantee] = true
		if !slices.Contains(defined, name) {
			t.Errorf("mutant %s is not in the model", name)
		}
		if !slices.Contains(guarantees, guarantee) {
			t.Errorf("mutant %s violates %s, which is not in the model", name, guarantee)
		}
	}
	for _, guarantee := range guarantees {
		if !violated[guarantee] {
			t.Errorf("no mutant violates %s: nothing shows that it can fail", guarantee)
		}
	}
}

func TestModelHolds(t *testing.T) {
	t.Parallel()
	v := newVerifier(t)
	for _, guarantee := range names(property, read(t)) {
		output, errs := v.check(t, guarantee)
		if errs != "0" {
			t.Errorf("%s: %s errors\n%s", guarantee, errs, output)
		}
		if strings.Contains(output, "max search depth too small") || strings.Contains(output, "Search not completed") {
			t.Errorf("%s: the search did not cover every state\n%s", guarantee, output)
		}
		if !strings.Contains(output, "Full statespace search") {
			t.Errorf("%s: not a full search\n%s", guarantee, output)
		}
		if guarantee != "effect_at_most_once" {
			continue // claims about what happens eventually cut the search short where it happened
		}
		for _, line := range unreached.FindAllString(output, -1) {
			if !strings.Contains(line, `"-end-"`) {
				t.Errorf("a step that is never taken proves nothing: %s", line)
			}
		}
	}
}

func TestMutantsAreRejected(t *testing.T) {
	t.Parallel()
	for name, guarantee := range mutants {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := newVerifier(t, "-D"+name)
			if output, errs := v.check(t, guarantee); errs == "0" {
				t.Errorf("%s holds in spite of %s\n%s", guarantee, name, output)
			}
		})
	}
}

func read(t *testing.T) string {
	t.Helper()
	source, err := os.ReadFile("inbox.pml")
	if err != nil {
		t.Fatal(err)
	}
	return string(source)
}

// names returns what the expression's group matched, each once.
func names(expression *regexp.Regexp, source string) []string {
	var found []string
	for _, match := range expression.FindAllStringSubmatch(source, -1) {
		found = append(found, match[1])
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// verifier is the program that Spin generates from the model.
type verifier string

func newVerifier(t *testing.T, definitions ...string) verifier {
	t.Helper()
	for _, tool := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			message := fmt.Sprintf("%s is not installed (Debian's packages spin and gcc)", tool)
			if slices.Contains(strings.Split(os.Getenv("INBOX_TEST_REQUIRE"), ","), "spin") {
				t.Fatal(message)
			}
			t.Skip(message)
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "inbox.pml"), []byte(read(t)), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, dir, "spin", append(definitions, "-a", "inbox.pml")...)
	run(t, dir, "gcc", "-O1", "-w", "-DNFAIR=3", "-o", "pan", "pan.c")
	return verifier(dir)
}

// check verifies one property under weak fairness: whoever can always go on does so at some time.
func (v verifier) check(t *testing.T, guarantee string) (output, errs string) {
	t.Helper()
	output = run(t, string(v), "./pan", "-a", "-f", "-m100000", "-N", guarantee)
	match := errorCount.FindStringSubmatch(output)
	if match == nil || !strings.Contains(output, "ltl formula "+guarantee+"\n") {
		t.Fatalf("%s was not checked:\n%s", guarantee, output)
	}
	return output, match[1]
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), name, args...)
	command.Dir = dir
	output, err := command.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && (name != "./pan" || !errors.As(err, &exit)) { // pan's status says that it found errors
		t.Fatalf("%s: %v\n%s", strings.Join(command.Args, " "), err, output)
	}
	return string(output)
}
