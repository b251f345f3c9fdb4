// Package storetest checks that an [inbox.Store] holds its contract, and measures what it costs. Run it in the tests of
// the store:
//
//	func TestConformance(t *testing.T) {
//		storetest.Run(t, func(t *testing.T) *storetest.Harness { … })
//	}
//
// The contract, each point a subtest of the name given:
//
//  1. ClaimsOnce: a committed claim is a record for every later Begin.
//  2. EffectsComeWithTheClaim: what was written through the transaction is there if and only if the claim is.
//  3. RollbackReleasesClaim: after a rollback the key can be claimed, and nothing is left.
//  4. RollbackWithEndedContext: a rollback whose context ended undoes everything nevertheless, whatever it returned.
//  5. RollbackIsIdempotent: Rollback does nothing the second time, and after Commit. Commit after Rollback fails.
//  6. LostConnectionReleasesClaim: a killed connection fails the commit, and the key can be claimed. An
//     [inbox.LossDetector] tells it from other rollbacks.
//  7. CommitProvesTheClaim: a transaction that ended behind the store's back is never committed without an error.
//  8. ConcurrentClaimsRunOnce: of many deliveries at once, one owns the claim and commits.
//  9. WaiterSkipsAfterCommit: a Begin that waits for another transaction gets its record once it committed.
//  10. WaiterRunsAfterRollback: a Begin that waits for another transaction gets the claim once it rolled back.
//  11. WaiterHoldsUpNoOtherKey: while a Begin waits, other keys are claimed and committed.
//  12. WaitIsBounded: a claim held for longer than LockTimeout is ErrInFlight, and its holder commits as if nothing was.
//  13. WaitLeavesTheSessionAlone: LockTimeout is the claim's alone, and the handler has the session's own.
//  14. KeysAreExact: keys that differ in any byte are different.
//  15. KeysOfAnyBytes: what [inbox.Key.Normalize] returns can be stored, whatever went in.
//  16. ConsumersAreIndependent: each consumer processes a message, and ("ab", "c") is not ("a", "bc").
//  17. CancelledBeforeBegin: Begin with an ended context returns its error and claims nothing.
//  18. CancelledWhileWaiting: a context that ends during the wait ends it, with the context's error.
//  19. CancelledInTheHandler: after a statement whose context ended, claim and effects are both there or both not.
//  20. CancelledAnywhere: whenever a delivery's context ends, claim and effects are both there or both not.
//  21. TransactionOutlivesBegin: the end of Begin's context does not end the transaction.
//  22. CommitWithEndedContext: claim and effects are both there or both not, whatever Commit returned.
//  23. NativeIsDeadAfterwards: the native transaction cannot be used after the end.
//  24. RecordTellsTimes: a record has plausible times, the claim's not after the seal's.
//  25. FingerprintIsKept: a record has the fingerprint of the claim that was committed, or none.
//  26. AnyPayloadIsStored: a claim with a message is never refused for its payload or metadata.
//  27. OutputsAreKept: a record has its outputs, in order and byte for byte, with metadata that is not nil.
//  28. OutputsGoWithTheirRecord: the outputs of a commit that failed, or of a key that was forgotten, are in no later record.
//  29. OutputsAreMarked: marked outputs are gone, those of others stay. For an [inbox.OutputsMarker].
//  30. DeletesByAge: no record is deleted before it was there for the age, and every one some time afterwards. For a store
//     with DeleteExpired, as the next three.
//  31. DeletesInBatches: deletion keeps to its limit and counts.
//  32. DeletesNoUnpublishedOutputs: records with outputs stay until the outputs are marked.
//  33. DeletesBesideClaims: deletion neither waits for claims, nor releases them, nor lets a key be processed twice.
//  34. ForgetsKeys: a forgotten key can be claimed. For a store with Forget.
//  35. StoresShareClaims: two stores on one table are one inbox.
//  36. TablesAreIndependent: two tables are two inboxes. For a store with InitializeSchema, as the next one.
//  37. CreatesItsSchema: InitializeSchema works many times at once, and leaves a table that is there as it is.
//  38. ClassifiesErrors: plain errors and ErrInFlight are not transient. For an [inbox.TransientClassifier], as the next one.
//  39. ClassifiesWrappedErrors: a transient error is transient in whatever it is wrapped.
//  40. LeavesNoConnection: after all ways that a delivery can end, no connection is in use.
//  41. LeavesNoGoroutine: nor is there a goroutine.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox"
)

// Harness is what the suite needs of a store. Each check gets a new one, whose table is empty. What is optional may be
// nil: then the checks that need it are skipped, and say so.
type Harness struct {
	// Store is what is checked. Required.
	Store inbox.Store

	// Write writes an effect, a text of up to 1,000 bytes, through a native transaction. Required.
	Write func(ctx context.Context, native any, effect string) error

	// Effects returns the committed effects, in any order. Required.
	Effects func(ctx context.Context) ([]string, error)

	// Another returns a further store on the same table, as another process has it.
	Another func() (inbox.Store, error)

	// OnNewTable returns a store on another table, which does not exist yet.
	OnNewTable func() (inbox.Store, error)

	// Kill cuts a native transaction's connection on the server's side.
	Kill func(ctx context.Context, native any) error

	// Undo rolls a native transaction back behind the store's back, as a raw ROLLBACK does.
	Undo func(ctx context.Context, native any) error

	// LockTimeout returns the session's own limit for lock waits, in any form, as a native transaction sees it; for nil, as
	// a transaction sees it that the store has nothing to do with.
	LockTimeout func(ctx context.Context, native any) (string, error)

	// Transient is an error of the driver that says that the whole transaction may be tried again.
	Transient error

	// InUse returns how many connections are in use.
	InUse func() int

	// CloseIdle closes the connections that are not in use, some drivers of which have goroutines. It is called once, and
	// nothing comes after it.
	CloseIdle func()

	// Baseline writes an effect in a transaction of its own, without the store: what [Benchmark] compares with.
	Baseline func(ctx context.Context, effect string) error

	// Serial says why the database has one writing transaction at a time, so that a claim of any key waits while another is
	// open, and ends in a transient error. Checks of what happens beside an open transaction are skipped. Empty if it has
	// several.
	Serial string
}

// timeout is for each check: what hangs has failed.
const timeout = 60 * time.Second

// check is one point of the contract.
type check struct {
	name   string
	run    func(context.Context, *Harness) error
	beside bool // needs several transactions at a time
}

// errSkip is returned by checks that a store has no part in.
var errSkip = errors.New("skipped")

func skip(why string) error { return fmt.Errorf("%w: %s", errSkip, why) }

var checks = []check{
	{name: "ClaimsOnce", run: claimsOnce},
	{name: "EffectsComeWithTheClaim", run: effectsComeWithTheClaim},
	{name: "RollbackReleasesClaim", run: rollbackReleasesClaim},
	{name: "RollbackWithEndedContext", run: rollbackWithEndedContext},
	{name: "RollbackIsIdempotent", run: rollbackIsIdempotent},
	{name: "LostConnectionReleasesClaim", run: lostConnectionReleasesClaim},
	{name: "CommitProvesTheClaim", run: commitProvesTheClaim},
	{name: "ConcurrentClaimsRunOnce", run: concurrentClaimsRunOnce},
	{name: "WaiterSkipsAfterCommit", run: waiterSkipsAfterCommit, beside: true},
	{name: "WaiterRunsAfterRollback", run: waiterRunsAfterRollback, beside: true},
	{name: "WaiterHoldsUpNoOtherKey", run: waiterHoldsUpNoOtherKey, beside: true},
	{name: "WaitIsBounded", run: waitIsBounded, beside: true},
	{name: "WaitLeavesTheSessionAlone", run: waitLeavesTheSessionAlone},
	{name: "KeysAreExact", run: keysAreExact},
	{name: "KeysOfAnyBytes", run: keysOfAnyBytes},
	{name: "ConsumersAreIndependent", run: consumersAreIndependent},
	{name: "CancelledBeforeBegin", run: cancelledBeforeBegin},
	{name: "CancelledWhileWaiting", run: cancelledWhileWaiting, beside: true},
	{name: "CancelledInTheHandler", run: cancelledInTheHandler},
	{name: "CancelledAnywhere", run: cancelledAnywhere},
	{name: "TransactionOutlivesBegin", run: transactionOutlivesBegin},
	{name: "CommitWithEndedContext", run: commitWithEndedContext},
	{name: "NativeIsDeadAfterwards", run: nativeIsDeadAfterwards},
	{name: "RecordTellsTimes", run: recordTellsTimes},
	{name: "FingerprintIsKept", run: fingerprintIsKept},
	{name: "AnyPayloadIsStored", run: anyPayloadIsStored},
	{name: "OutputsAreKept", run: outputsAreKept},
	{name: "OutputsGoWithTheirRecord", run: outputsGoWithTheirRecord},
	{name: "OutputsAreMarked", run: outputsAreMarked},
	{name: "DeletesByAge", run: deletesByAge},
	{name: "DeletesInBatches", run: deletesInBatches},
	{name: "DeletesNoUnpublishedOutputs", run: deletesNoUnpublishedOutputs},
	{name: "DeletesBesideClaims", run: deletesBesideClaims},
	{name: "ForgetsKeys", run: forgetsKeys},
	{name: "StoresShareClaims", run: storesShareClaims},
	{name: "TablesAreIndependent", run: tablesAreIndependent},
	{name: "CreatesItsSchema", run: createsItsSchema},
	{name: "ClassifiesErrors", run: classifiesErrors},
	{name: "ClassifiesWrappedErrors", run: classifiesWrappedErrors},
	{name: "LeavesNoConnection", run: leavesNoConnection},
	{name: "LeavesNoGoroutine", run: leavesNoGoroutine},
}

// Run runs every check as a parallel subtest.
func Run(t *testing.T, newHarness func(t *testing.T) *Harness) {
	t.Helper()
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			err := c.against(t.Context(), newHarness(t))
			if errors.Is(err, errSkip) {
				t.Skip(err)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// against runs the check, and fails it when it hangs or panics.
func (c check) against(ctx context.Context, h *Harness) error {
	if c.beside && h.Serial != "" {
		return skip(h.Serial)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if value := recover(); value != nil {
				done <- fmt.Errorf("panic: %v", value)
			}
		}()
		done <- c.run(ctx, h)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("hangs: %w", ctx.Err())
	}
}
