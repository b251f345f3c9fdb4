package dialect

import (
	"errors"
	"sync/atomic"
	"time"
)

// CheckExpired returns what is wrong with the arguments of DeleteExpired.
func CheckExpired(age time.Duration, limit int) error {
	if age < 0 {
		return errors.New("inbox: delete expired records: the age is negative")
	}
	if limit <= 0 {
		return errors.New("inbox: delete expired records: the limit is not positive")
	}
	return nil
}

// ExpiredCursor remembers how far the deletion of expired rows got. What was deleted stays in PostgreSQL's index until it
// is vacuumed, and a batch that began at the beginning would step over all of it again. The zero value is at the
// beginning. It is safe for concurrent use.
type ExpiredCursor struct{ after atomic.Int64 }

// Delete deletes up to limit rows from the cursor on, and if there are not as many, from the beginning: what was locked when
// the cursor passed it, or waited for its outputs to be published. The function runs [Statements.DeleteExpired].
func (c *ExpiredCursor) Delete(
	limit int, deleteExpired func(limit int, after int64) (deleted int, last int64, err error),
) (int, error) {
	after := c.after.Load()
	deleted, last, err := deleteExpired(limit, after)
	if err != nil {
		return 0, err
	}
	if deleted == limit {
		c.after.Store(last - 1) // less than the fraction that older servers' floating-point numbers may be off by
		return deleted, nil
	}
	c.after.Store(0)
	if after == 0 {
		return deleted, nil
	}
	more, _, err := deleteExpired(limit-deleted, 0)
	return deleted + more, err
}
