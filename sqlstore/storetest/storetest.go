// Package storetest checks that an [inbox.Store] holds its contract. Run it in a test of the store:
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
//  4. RollbackIsIdempotent: Rollback does nothing the second time, and after Commit. Commit after Rollback fails.
//  5. LostConnectionReleasesClaim: a killed connection fails the commit, and the key can be claimed.
//  6. ConcurrentClaimsRunOnce: of many deliveries at once, one owns the claim and commits.
//  7. WaiterSkipsAfterCommit: a Begin that waits for another transaction gets its record once it committed.
//  8. WaiterRunsAfterRollback: a Begin that waits for another transaction gets the claim once it rolled back.
//  9. WaitIsBounded: a claim held for longer than LockTimeout is ErrInFlight, and holds up no other key.
//  10. KeysAreExact: keys that differ in any byte are different.
//  11. KeysOfAnyBytes: what [inbox.Key.Normalize] returns can be stored, whatever went in.
//  12. ConsumersAreIndependent: each consumer processes a message, and ("ab", "c") is not ("a", "bc").
//  13. CancelledBeforeBegin: Begin with an ended context returns its error and claims nothing.
//  14. CancelledWhileWaiting: a context that ends during the wait ends it, with the context's error.
//  15. TransactionOutlivesBegin: the end of Begin's context does not end the transaction.
//  16. CommitWithEndedContext: claim and effects are both there or both not, whatever Commit returned.
//  17. NativeIsDeadAfterwards: the native transaction cannot be used after the end.
//  18. RecordTellsTimes: a record has plausible times, the claim's not after the seal's.
//  19. FingerprintIsKept: a record has its claim's fingerprint, or none.
//  20. AnyPayloadIsStored: a claim with a message is never refused for its payload or metadata.
//  21. OutputsAreKept: a record has its outputs, in order and byte for byte; none after a rollback.
//  22. OutputsAreMarked: marked outputs are gone, those of others stay. For an [inbox.OutputsMarker].
//  23. DeletesExpired: deletion by age is strict, limited and counted, spares unpublished outputs, and does not disturb
//     claims. For a store with DeleteExpired.
//  24. ForgetsKeys: a forgotten key can be claimed. For a store with Forget.
//  25. StoresShareClaims: two stores on one table are one inbox.
//  26. ClassifiesErrors: plain errors and ErrInFlight are not transient. For an [inbox.TransientClassifier].
//  27. LeavesNothingOver: no connection stays in use.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox"
)

// Harness is what the suite needs of a store. Each check gets a new one, whose table is empty.
type Harness struct {
	// Store is what is checked. Required.
	Store inbox.Store

	// Write writes an effect through a native transaction. Required.
	Write func(ctx context.Context, native any, effect string) error

	// Effects returns the committed effects, in any order. Required.
	Effects func(ctx context.Context) ([]string, error)

	// Another returns a further store on the same table, as another process has it. Nil skips what needs it.
	Another func() (inbox.Store, error)

	// Kill cuts a native transaction's connection on the server's side. Nil skips what needs it.
	Kill func(ctx context.Context, native any) error

	// InUse returns how many connections are in use. Nil skips what needs it.
	InUse func() int

	// Serial says why the database has one writing transaction at a time, so that a claim of any key waits while another is
	// open, and ends in a transient error. Checks of what happens beside an open transaction are skipped.
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
	{name: "RollbackIsIdempotent", run: rollbackIsIdempotent},
	{name: "LostConnectionReleasesClaim", run: lostConnectionReleasesClaim},
	{name: "ConcurrentClaimsRunOnce", run: concurrentClaimsRunOnce},
	{name: "WaiterSkipsAfterCommit", run: waiterSkipsAfterCommit, beside: true},
	{name: "WaiterRunsAfterRollback", run: waiterRunsAfterRollback, beside: true},
	{name: "WaitIsBounded", run: waitIsBounded, beside: true},
	{name: "KeysAreExact", run: keysAreExact},
	{name: "KeysOfAnyBytes", run: keysOfAnyBytes},
	{name: "ConsumersAreIndependent", run: consumersAreIndependent},
	{name: "CancelledBeforeBegin", run: cancelledBeforeBegin},
	{name: "CancelledWhileWaiting", run: cancelledWhileWaiting, beside: true},
	{name: "TransactionOutlivesBegin", run: transactionOutlivesBegin},
	{name: "CommitWithEndedContext", run: commitWithEndedContext},
	{name: "NativeIsDeadAfterwards", run: nativeIsDeadAfterwards},
	{name: "RecordTellsTimes", run: recordTellsTimes},
	{name: "FingerprintIsKept", run: fingerprintIsKept},
	{name: "AnyPayloadIsStored", run: anyPayloadIsStored},
	{name: "OutputsAreKept", run: outputsAreKept},
	{name: "OutputsAreMarked", run: outputsAreMarked},
	{name: "DeletesExpired", run: deletesExpired},
	{name: "ForgetsKeys", run: forgetsKeys},
	{name: "StoresShareClaims", run: storesShareClaims},
	{name: "ClassifiesErrors", run: classifiesErrors},
	{name: "LeavesNothingOver", run: leavesNothingOver},
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
