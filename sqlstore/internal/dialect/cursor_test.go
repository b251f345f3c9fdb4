package dialect_test

import (
	"errors"
	"testing"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// TestExpiredCursor deletes rows that expired at 1 to 10, of which 2 is locked at first.
func TestExpiredCursor(t *testing.T) {
	t.Parallel()
	rows := map[int64]bool{1: true, 3: true, 4: true, 5: true, 6: true, 7: true, 8: true, 9: true, 10: true}
	var began []int64
	deleteExpired := func(limit int, after int64) (deleted int, last int64, err error) {
		began = append(began, after)
		for at := max(after, 1); at <= 10 && deleted < limit; at++ {
			if rows[at] {
				delete(rows, at)
				deleted++
				last = at
			}
		}
		return deleted, last, nil
	}
	var cursor dialect.ExpiredCursor
	call := func(limit, want int, wantBegan ...int64) {
		t.Helper()
		began = nil
		deleted, err := cursor.Delete(limit, deleteExpired)
		if deleted != want || err != nil {
			t.Errorf("deleted %d, want %d (%v)", deleted, want, err)
		}
		if len(began) != len(wantBegan) || began[0] != wantBegan[0] || began[len(began)-1] != wantBegan[len(wantBegan)-1] {
			t.Errorf("began at %v, want %v", began, wantBegan)
		}
	}
	call(3, 3, 0)
	call(3, 3, 3)
	rows[2] = true
	call(3, 3, 6)
	call(3, 1, 9, 0) // what was locked
	call(3, 0, 0)
}

func TestExpiredCursorCountsWhatWasDeletedBeforeAnError(t *testing.T) {
	t.Parallel()
	failure := errors.New("failure")
	var cursor dialect.ExpiredCursor
	answers := []struct {
		deleted int
		err     error
	}{{5, nil}, {2, nil}, {0, failure}}
	deleteExpired := func(int, int64) (int, int64, error) {
		answer := answers[0]
		answers = answers[1:]
		return answer.deleted, 100, answer.err
	}
	if deleted, err := cursor.Delete(5, deleteExpired); deleted != 5 || err != nil {
		t.Error(deleted, err)
	}
	if deleted, err := cursor.Delete(5, deleteExpired); deleted != 2 || !errors.Is(err, failure) {
		t.Error(deleted, err)
	}
}
