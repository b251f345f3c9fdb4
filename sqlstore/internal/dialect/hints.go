package dialect

import (
	"context"
	"errors"
	"strings"
)

const (
	// HintAborted explains the commit of a transaction in which a statement failed.
	HintAborted = "an error inside the transaction was swallowed; put Retry and PoisonQueue outside the inbox"

	// HintEnded explains a transaction that is gone before its commit.
	HintEnded = "the handler ended the transaction itself (a raw ROLLBACK or COMMIT, Commit or Rollback of its *sql.Tx, " +
		"DDL on MySQL), or the database did and the error was swallowed; the transaction belongs to the inbox"

	// HintBusy explains a connection that cannot take the next statement.
	HintBusy = "the handler left rows open; close them before it returns"

	// HintSchema explains a table or column that is not there.
	HintSchema = "create or migrate the inbox table: see InitializeSchema, Migrations and CheckSchema"

	// HintSession explains a table that was there when the key was claimed.
	HintSession = "the handler left the session's search_path or role changed: set it back before it returns, or give the " +
		"store a qualified Table, and the role the inbox's privileges"

	// HintPool explains the wait for a connection that ended without one.
	HintPool = "no connection became free in time: the pool is too small for the handlers that run at once, or handlers " +
		"use the database beside their transaction and so need a second connection"

	// HintSecondConn explains a handler that ran out of time while no connection was free.
	HintSecondConn = "every connection of the pool was in use: if the handler uses the database beside its transaction, it " +
		"waited for a second connection"
)

// IsBusy reports whether err says that rows were left open. No driver has a code for it.
func IsBusy(err error) bool {
	if err == nil {
		return false
	}
	text := err.Error()
	return strings.Contains(text, "conn busy") || strings.Contains(text, "busy buffer") ||
		strings.Contains(text, "unexpected Parse response") || strings.Contains(text, "unexpected Bind response")
}

// Hint returns what usually lies behind an error of that class in a handler or a commit, or "".
func Hint(class Class, err error) string {
	switch {
	case class == Aborted:
		return HintAborted
	case IsBusy(err):
		return HintBusy
	}
	return ""
}

// HandlerHint returns what usually lies behind an error of that class in a handler, or "". exhausted says that every
// connection of the pool is in use.
func HandlerHint(class Class, err error, exhausted bool) string {
	if exhausted && errors.Is(err, context.DeadlineExceeded) {
		return HintSecondConn
	}
	return Hint(class, err)
}

// CommitHint returns what usually lies behind an error of that class from the seal or the COMMIT, or "". COMMIT of an aborted
// transaction is an error without a code in pgx and lib/pq.
func CommitHint(class Class, err error) string {
	if class == Schema || class == Privilege {
		return HintSession
	}
	if text := err.Error(); strings.Contains(text, "resulted in rollback") || strings.Contains(text, "failed transaction") {
		return HintAborted
	}
	if strings.Contains(err.Error(), "unexpected transaction status") {
		return HintEnded
	}
	return Hint(class, err)
}
